"""The numerics gate: is training under a policy as good as in FP32, and which modules need FP32."""
