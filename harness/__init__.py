"""The benchmark harness: plan -> launch -> supervise -> verify and time -> store."""
