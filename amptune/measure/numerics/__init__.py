"""Compares training under a policy with training in FP32."""
