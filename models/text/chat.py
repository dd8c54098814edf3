"""Chat templates: from a list of messages to the text that a model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from models.errors import ModelError, brief


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Renders a chat template up to where the model's own answer begins.

    Templates come with the weights and are programs, so they run in jinja's sandbox and cannot
    change what they are given.

    Args:
        template: the jinja source.
        messages: dicts with "role" and "content".
        **variables: what else the template may ask for: `bos_token`, `tools`,
            `enable_thinking` ...
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The settings and helpers that templates written for Hugging Face count on.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def raise_exception(message):
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **variables
        )
    except Exception as error:  # a template can do whatever its language can
        raise ModelError(
            f"The model's chat template does not take these messages: {brief(error)}."
        ) from error


def _to_json(value, indent=None, ensure_ascii=False, separators=None, sort_keys=False):
    # jinja's own filter escapes what HTML would trip over; a prompt is not HTML.
    return json.dumps(
        value,
        indent=indent,
        ensure_ascii=ensure_ascii,
        separators=separators,
        sort_keys=sort_keys,
    )
