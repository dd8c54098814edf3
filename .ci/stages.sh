# Shared by .ci/run and .ci/nightly: timed stages, a summary, the README's test command, and the search
# for Pythons. Source it in the repository root.
set -uo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# Without bytecode every process would compile all packages again, tests included.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH VIRTUAL_ENV PYTEST_ADDOPTS

failed=()
summary=()

# stage SECONDS HEADING COMMAND...: run it, print its result and its time. It fails after SECONDS.
stage() {
  local limit=$1 heading=$2 start=$SECONDS status word=ok
  shift 2
  printf '\n=== %s\n' "$heading"
  timeout --signal=INT --kill-after=30 "$limit" "$@" </dev/null
  status=$?
  if ((status == 124 || status == 137)); then
    word="out of time"
  elif ((status != 0)); then
    word="failed ($status)"
  fi
  ((status == 0)) || failed+=("$heading")
  summary+=("$(printf '%5d s  %-12s %s' $((SECONDS - start)) "$word" "$heading")")
  printf -- '--- %s: %s, %d s\n' "$heading" "$word" $((SECONDS - start))
  return "$status"
}

finish() {
  printf '\n=== summary, %d s in all\n' "$SECONDS"
  printf '%s\n' "${summary[@]}"
  if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
  fi
  echo "all stages passed"
  exit 0
}

# The README's test command: the line after the fence that follows the comment <!-- test -->.
test_command() {
  awk '/<!-- test -->/ {mark = 1; next}
       mark && /^```/ {if (inside) exit; inside = 1; next}
       inside && NF {print}' README.md
}

readme_line=$(test_command)
if [[ $readme_line != "python3 -m venv .venv && "*" && .venv/bin/python -m pytest" || $readme_line == *$'\n'* ]]; then
  echo "README.md: expected after <!-- test --> a fenced block of one line that begins with"
  echo "'python3 -m venv .venv && ' and ends with ' && .venv/bin/python -m pytest', got:"
  echo "${readme_line:-nothing}"
  exit 1
fi

# in_lane PYTHON FOLDER: the README's test command with this Python, and the environment in FOLDER.
in_lane() {
  local line=${readme_line/#python3 /$1 }
  printf '%s' "${line//.venv/$2}"
}

version_of() { "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# newer_than VERSION: the newest Python above it that runs (shims on PATH may exist and fail).
newer_than() {
  local candidate found root
  root=$(pyenv root 2>/dev/null)
  for candidate in python3.14 python3.13 python3.12 \
    ${root:+"$root"/versions/3.1[4-9]*/bin/python3 "$root"/versions/3.13*/bin/python3 "$root"/versions/3.12*/bin/python3}; do
    found=$(version_of "$candidate") || continue
    if [ "$found" != "$1" ] && [ "$(printf '%s\n' "$found" "$1" | sort -V | tail -n 1)" = "$found" ]; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}
