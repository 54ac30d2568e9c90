"""The part that training imports: applies a policy to a model and undoes it exactly. No Optuna, click or rich."""
