#!/bin/bash
# Tunes on each kind of GPU, puts the policies into one profile, and trains, each step after the one before succeeded:
#   examples/slurm/submit.sh workload.py:workload train.py a100 h200      # the last are features of the nodes
set -euo pipefail

here=$(dirname "$0") target=$1 training=$2
mkdir -p policies
tunings="" policies=()
for feature in "${@:3}"; do
    policies+=("policies/$feature.yaml")
    job=$(sbatch --parsable --constraint="$feature" "$here/tune.sbatch" "$target" "policies/$feature.yaml")
    tunings+=":$job"
done
profile=$(sbatch --parsable --job-name=profile --dependency="afterok$tunings" \
    --wrap "amptune profile build ${policies[*]} -o policy.yaml && amptune check policy.yaml --any-hardware")
sbatch --dependency="afterok:$profile" "$here/train.sbatch" "$training"
