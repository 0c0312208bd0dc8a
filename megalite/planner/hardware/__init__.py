"""Machines and software stacks as data: YAML files of rates, latencies and efficiencies. No torch."""
