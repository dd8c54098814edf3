"""Chat templates of GGUF files; those of folders are rendered by `transformers`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render a chat template up to the beginning of the answer.

    A template is a program that comes with the weights. The template runs in jinja's sandbox, and
    cannot change its arguments.

    Args:
      template: jinja source of the template.
      messages: dicts with "role" and "content".
      **variables: variables of the template: `bos_token`, `tools`, `enable_thinking` ...
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Templates for Hugging Face require these settings and helpers.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.add_extension(_generation_tag())
    environment.filters["tojson"] = _to_json
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def raise_exception(message):
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=True, **variables
    )


def _generation_tag() -> type:
    """Return the extension with the tag `generation`, which marks answers for training."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(value, indent=None, ensure_ascii=False, **options):
    # jinja's filter escapes characters for HTML, which a prompt is not.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
