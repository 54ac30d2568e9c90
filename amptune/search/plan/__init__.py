"""The budget: the time there is, what each stage may take of it, and what compiling costs."""
