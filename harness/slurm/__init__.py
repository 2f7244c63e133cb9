"""Slurm: from planned jobs to sbatch scripts, what runs on each rank of an allocation, and what Slurm says later."""
