# Certificates of this start alone, in a folder of the shared file system that only this user can open.
mkdir -p "$out" || exit 2
on_first_host "${make_certificates[@]}" "$MESHKIT_MTLS" --host "$(first_host)" || exit 2
trap 'rm -rf -- "$MESHKIT_MTLS"' EXIT
