"""`maitred load docs`: the pages that list every setting of a load run and of a chaos plan, for `make docs`."""

from typing import Annotated

import typer

SPEC_PREAMBLE = """\
# Settings of a load run

<!-- Written by `maitred load docs` (`make docs`) from the structs that hold the settings. Do not edit. -->

What the YAML file of [`maitred load run`](load.md) and of `maitred load sweep` may say. Everything has a default except
how the load arrives. The options of the command line write the same settings and win over the file; `--set
section.setting=value` reaches all of them. An unknown name is an error, and all faults are listed at once.

```yaml
target:
  url: http://127.0.0.1:8000
  api_key: {env: OPENAI_API_KEY}
arrivals:
  rate_per_s: 5
  profile: spike:at=60,for=20,factor=4
shape:
  prompt_tokens: lognormal:mean=400,cv=1
  output_tokens: lognormal:mean=150,cv=0.8
  turns: uniform:1..4
  think_s: exponential:mean=5
tenants:
  search: {share: 3}
  chat: {share: 1, api_key: {file: chat.key}}
bounds:
  duration_s: 3m
  warmup_s: 20s
objectives:
  ttft_s: 1s
  tpot_s: 80ms
```

Seconds are written as a number or with a unit: `1.5`, `500ms`, `30s`, `2m`, `1h`. Secrets are never written into the
file: `{env: NAME}` takes one from an environment variable, `{file: path}` from a file, and results name only that.
Relative paths start at the working directory.
"""


PLAN_PREAMBLE = """\
# Settings of a chaos plan

<!-- Written by `maitred load docs --plan` (`make docs`) from the structs that hold the settings. Do not edit. -->

What the YAML file of [`maitred load chaos`](load.md#breaking-things-on-purpose) may say. An unknown name is an error,
and all faults are listed at once. Seconds and sizes take units: `500ms`, `2m`, `64MiB`.

## `load`

A load run; see [load-settings.md](load-settings.md). Its `target.url` is that of the installation.
"""


def docs(
    plan: Annotated[bool, typer.Option("--plan", help="docs/load-plans.md in place of docs/load-settings.md.")] = False,
) -> None:
    """Prints docs/load-settings.md, or docs/load-plans.md."""
    typer.echo(plan_page() if plan else spec_page(), nl=False)


def spec_page() -> str:
    """Renders the page `docs/load-settings.md`."""
    from maitred.config.render import document_reference
    from maitred.load.spec import LoadSpec

    return SPEC_PREAMBLE + document_reference(LoadSpec)


def plan_page() -> str:
    """Renders the page `docs/load-plans.md`."""
    from maitred.config.render import document_reference
    from maitred.load.chaos.plan import ChaosPlan

    return PLAN_PREAMBLE + document_reference(ChaosPlan, without={"load"})
