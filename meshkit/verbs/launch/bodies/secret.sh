# What the processes of this start know and nobody else does: it is in no file and on no command line.
MESHKIT_SECRET="$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')"
[ "${#MESHKIT_SECRET}" -eq 64 ] || exit 2
export MESHKIT_SECRET
