"""What a framework needs beyond `amptune.apply`; each module imports its framework, and nothing imports them."""
