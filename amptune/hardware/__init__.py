"""What this machine can do: GPU, CPU and software as a value, read by `amptune.hardware.probing`."""
