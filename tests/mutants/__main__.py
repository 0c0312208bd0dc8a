"""Insert each fault of the catalogue into a copy of megalite, and check that its test fails.

    python -m tests.mutants [TEXT ...] [--no-control]

TEXT selects mutants by name or test; default: all. First the tests run without a fault, and must pass. The last line is the
report as JSON; the exit status is 1 unless every mutant was killed."""

import argparse
import json
import sys
import time

from tests.mutants.mutant import MUTANTS, ROOT, MutantError, copy_of, judge, run_tests


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="only mutants with it in their name or test")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests without a fault first")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.texts or any(text in f"{mutant.name} {mutant.test}" for text in arguments.texts)
    ]
    started = time.monotonic()
    if not arguments.no_control:
        with copy_of(ROOT) as copy:
            control = run_tests(copy, list(dict.fromkeys(mutant.test for mutant in chosen)))
        if control.returncode != 0:
            print(f"{control.stdout}{control.stderr}\nthe tests fail without a fault: no mutant was tried")
            return 1
        print(f"without a fault the tests pass, {time.monotonic() - started:.0f} s", flush=True)
    survived, errors = [], []
    for mutant in chosen:
        try:
            verdict = judge(mutant)
        except MutantError as error:
            errors.append(mutant.name)
            print(f"ERROR     {error}", flush=True)
            continue
        if not verdict.killed:
            survived.append(mutant.name)
        state = "killed" if verdict.killed else "SURVIVED"
        print(f"{state:<10}{verdict.seconds:5.1f} s  {mutant.name:<40} {mutant.test}", flush=True)
    killed = len(chosen) - len(survived) - len(errors)
    print(f"killed {killed}/{len(chosen)} in {time.monotonic() - started:.0f} s")
    print(json.dumps({"killed": killed, "total": len(chosen), "survived": survived, "errors": errors}))
    return 0 if killed == len(chosen) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
