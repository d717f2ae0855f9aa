"""Write the generated pages, pictures and outputs of examples anew: `python -m docs.tools [PAGE...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from docs.tools import chart, commands, explaining, manual, measured, pages, pictures, translations

commands.PAGE.write_text(commands.reference(), encoding="utf-8")
manual.PAGE.parent.mkdir(exist_ok=True)
manual.PAGE.write_text(manual.manual(), encoding="utf-8")
measured.PAGE.write_text(measured.page(), encoding="utf-8")
for name, picture in {**explaining.drawn(), **chart.drawn()}.items():
    (pictures.PLACE / name).write_bytes(picture)
with tempfile.TemporaryDirectory() as place:
    for name, picture in pictures.pictures(Path(place)).items():
        (pictures.PLACE / name).write_bytes(picture)
chosen = [Path(name).resolve() for name in sys.argv[1:]] or pages.pages()
for page in chosen:
    with pages.home() as place:
        pages.rewrite(page, pages.type_page(page, place))
for translation in translations.ORIGINALS:
    translations.rewrite(translation)
