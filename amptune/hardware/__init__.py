"""Description of this machine as a value (GPU, CPU and software), and the code that reads it."""
