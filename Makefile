# SPDX-License-Identifier: Apache-2.0
# Forwards only: each target is a script that can be run by hand.
.PHONY: setup demo test parity lint lock schema image-cpu image-check bake-print

setup:
	@scripts/setup

demo:
	@.venv/bin/python scripts/demo.py

test:
	@scripts/test $(ARGS)

parity:
	@scripts/parity $(ARGS)

lint:
	@scripts/lint $(ARGS)

lock:
	@scripts/lock

schema:
	@scripts/schema $(ARGS)

image-cpu:
	@scripts/image-cpu $(ARGS)

image-check:
	@scripts/image-check $(ARGS)

bake-print:
	@.venv/bin/python scripts/bake-print $(ARGS)
