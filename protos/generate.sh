#!/bin/sh
# Generates the Python code of protos/outrider/v1; with --check, only says whether the committed code is up to date.
#
# grpcio-tools 1.76 on purpose: its code loads under protobuf 6.31 to 7. It wants protobuf 6 for itself,
# so it lives in an environment of its own, .protos-venv. PYTHON names the interpreter that makes it.
set -eu
cd "$(dirname "$0")/.."

tools_version=1.76.0
environment=.protos-venv
stamp="$environment/.grpcio-tools-$tools_version"
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "grpcio-tools==$tools_version" "protobuf<7"
    touch "$stamp"
fi

generate() {
    "$environment/bin/python" -m grpc_tools.protoc --proto_path=protos \
        --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" protos/outrider/v1/*.proto
}

if [ "${1:-}" != --check ]; then
    generate protos
    exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
mkdir "$fresh/committed"
cp protos/outrider/v1/*_pb2*.py* "$fresh/committed/"
if ! diff -r "$fresh/outrider/v1" "$fresh/committed"; then
    echo "the generated code is out of date: run 'make protos' and commit what it writes" >&2
    exit 1
fi
