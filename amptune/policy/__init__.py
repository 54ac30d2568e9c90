"""Policies, module rules and profiles as values; YAML in and out; where a policy is valid."""
