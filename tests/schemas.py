"""The schemas of docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from tests.corpus import ROOT

SCHEMAS = ROOT / "docs" / "schemas"


def check(value: Any, schema: Path) -> None:
    jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8"))).validate(value)
