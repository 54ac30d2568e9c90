"""`python -m amptune` is the command `amptune`."""

from amptune.cli.entry import main

if __name__ == "__main__":
    main()
