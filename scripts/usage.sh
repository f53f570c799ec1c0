# shellcheck shell=bash
# Sourced at the head of a script: prints the comment that the script begins with and ends it, where the arguments ask
# for help. #SBATCH ends it too. What follows `--` belongs to another program.
for argument in "$@"; do
  case "$argument" in
    -h | --help)
      sed -n '2,/^$\|^[^#]\|^#SBATCH/{/^# shellcheck/!s/^\(#$\|# \)//p}' "$0"
      exit 0
      ;;
    --) break ;;
  esac
done
