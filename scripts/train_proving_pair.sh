#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train the proving pair from nothing: about 15 minutes on one H200, after 3 minutes of corpus building on the CPU.
# usage: scripts/train_proving_pair.sh DOCS [STDLIB [FURTHER_STDLIB…]]
#   DOCS    _sources folder of the Python documentation (Debian: python3.11-doc, /usr/share/doc/python3.11/html/_sources)
#   STDLIB  lib/python3.11 of CPython 3.11.7, then those of 3.13.0 and 3.8.18 (default: the running interpreter's alone)
set -euo pipefail
docs=${1:?usage: $0 DOCS [STDLIB [FURTHER_STDLIB...]]}
stdlib=${2:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')}
shift $(($# < 2 ? $# : 2))
room=aeon_ddtree.proving_ground
work=${WORK:-build/proving-pair}
mkdir -p "$work"
python3 -m $room.corpus.build --stdlib "$stdlib" --further "$@" --docs "$docs" --out "$work/corpus"
python3 -m $room.train.run --corpus "$work/corpus" --compile --out "$work/first" \
  --target-seconds 290 --phase-a-seconds 20 --phase-b-seconds 75
python3 -m $room.train.run --corpus "$work/corpus" --compile --out "$work/second" \
  --target "$work/first/target" --drafter "$work/first/drafter" \
  --phase-a-seconds 0 --rows-b 57344 --phase-b-seconds 270 --draft-muon-lr 0.03 --draft-adam-lr 0.003 --seed 41
python3 -m $room.train.package --target "$work/first/target" --drafter "$work/second/drafter" \
  --corpus "$work/corpus" --weights "$work/weights"
python3 -m $room.train.evaluate --target "$work/weights/target" --drafter "$work/weights/drafter" \
  --corpus "$work/corpus" --json "$work/evaluation.json" --bpb-tokens 60000
