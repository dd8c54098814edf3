"""Ask the compiler for TPUs what planning a step costs, and print it.

Run it in a process of its own, `python -m tests.compilers.tpu_planning`: libtpu can be opened once.
"""

import json

from benchmarks.tpu_planning import cost

if __name__ == "__main__":
    step, _, updates = cost("v5e:2x4", 131_072, 8)
    print(json.dumps({"name": "eight devices", "cycles": step, "updates": updates}))
