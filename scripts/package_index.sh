# shellcheck shell=bash
# Sourced by scripts that run uv: it does not read pip's settings.
# shellcheck source=scripts/usage.sh
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"

# Gives uv the indexes and the certificate that pip of an environment has.
set_package_index() { # the environment
  local settings index more files certificate
  settings="$("$1/bin/python" -m pip config list | sed 's/\\n/ /g')"
  setting() { sed -n "s/^[^']*\.$1='\(.*\)'$/\1/p;T;q" <<<"$settings"; }
  index="$(setting index-url)" more="$(setting extra-index-url)"
  files="$(setting find-links)" certificate="$(setting cert)"
  [[ -z "$index" ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  [[ -z "$more" ]] || export UV_INDEX="${UV_INDEX:-$more}"
  [[ -z "$files" ]] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${files// /,}}"
  [[ -z "$certificate" ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificate}"
  export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # the best of all indexes, as pip takes it
}
