"""What is written down: policies, rules, profiles; YAML in and out; where a policy is valid."""
