export MESHKIT_MTLS="$out/mtls-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
on_first_host() { srun "${srun_options[@]}" --nodes=1 --ntasks=1 --nodelist="$(first_host)" "$@"; }
