#!/bin/sh
# Print the Python to build with, or say which system packages are missing and exit 1.
# `make` cannot be checked from a Makefile, so .ci/run calls this too.
set -u

python=
for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done

missing=
command -v make >/dev/null 2>&1 || missing="$missing make"
if [ -z "$python" ]; then
    missing="$missing python3 python3-venv"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing="$missing python3-venv"
fi
command -v g++ >/dev/null 2>&1 || missing="$missing g++"

if [ -n "$missing" ]; then
    {
        echo "phloem needs Python 3.11 or newer with venv, make and g++; missing here:$missing"
        echo "on Debian or Ubuntu: apt-get install$missing"
    } >&2
    exit 1
fi
echo "$python"
