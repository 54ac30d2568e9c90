"""What training imports: puts a policy on a model and takes it off again, exactly. No Optuna, click or rich."""
