# SPDX-License-Identifier: Apache-2.0
# Forwards only: each target is a script that can be run by hand.
.PHONY: setup demo test parity lint lock

setup:
	@scripts/setup

demo:
	@.venv/bin/python scripts/demo.py

test:
	@scripts/test $(ARGS)

parity:
	@scripts/parity $(ARGS)

lint:
	@scripts/lint

lock:
	@scripts/lock
