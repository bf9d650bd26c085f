"""The rules of the house that the code breaks.

python docs/architecture/draw.py --problems
"""

from __future__ import annotations

import argparse

import house


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", action="store_true", help="list arrows up or across, circles, homeless modules")
    parser.parse_args()
    found = [*house.problems(house.Code.read(), house.House.read()), *house.private_imports()]
    print(*found, f"{len(found)} problems", sep="\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
