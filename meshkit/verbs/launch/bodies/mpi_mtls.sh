export MESHKIT_MTLS="$out/mtls-$$"
on_first_host() { mpirun --host "$(first_host)" -np 1 "$@"; }
