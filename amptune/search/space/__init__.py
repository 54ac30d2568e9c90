"""The policies to try: knobs, space files, starting points, FP32 exclusions."""
