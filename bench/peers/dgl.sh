#!/bin/sh
# Makes bench/.dgl, the environment of DGL's side of bench/graph.py: DGL 2.1 needs an older torch than we do.
set -e
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m venv .dgl
.dgl/bin/pip install --quiet dgl==2.1.0 torch==2.2.1 torchdata==0.7.1 "numpy<2" "setuptools<70" pandas pyyaml pydantic
.dgl/bin/python -c "import dgl; print('DGL', dgl.__version__)"
