"""One unit on every rank: prepare, verify, time, verify again; and the floor of the machine."""
