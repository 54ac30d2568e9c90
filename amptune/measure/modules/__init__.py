"""Times each module by itself, and compares its results in half with those in FP32."""
