"""Record the keys of the config classes of Hugging Face transformers, with their defaults.

Run where transformers 5.24 is installed: `python tests/data/record_configs.py`. A class raises for
a value in `config_keys_tried.json` that it does not allow, unless jaxkv must refuse that value.
"""

import json
from pathlib import Path

from transformers import CONFIG_MAPPING

HERE = Path(__file__).parent

tried = json.loads((HERE / "config_keys_tried.json").read_text())
every, lines = tried.pop("every"), []
for family, own in tried.items():
    made = CONFIG_MAPPING[family]
    keys = json.loads(made().to_json_string(use_diff=False))
    base = json.loads((HERE / own["folder"] / "config.json").read_text())
    base.pop("time_step_limit", None)  # in another notation
    for key in keys:
        value, outcome, *beside = (every | own)[key]
        config = base | dict(*beside) | {key: value}
        if outcome != "refused":
            made(**{name: one for name, one in config.items() if one is not None})
    lines.append(f"{json.dumps(family)}: {json.dumps(keys)}")
(HERE / "config_keys.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
