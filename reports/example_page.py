"""Makes the example of a report's page, docs/example-report.html, from a confirmed tuning on an H200.

    python reports/example_page.py           # writes the page
    python reports/example_page.py --check   # exits with 1 if that page is not what would be written

The study is `h200/unseen/relative_attention.journal.gz`: `amptune tune reports/unseen_models.py:relative_attention
--budget 120s --study relative_attention`. The page is what `amptune report relative_attention -o example-report.html`
writes.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import tempfile
from pathlib import Path

from amptune.report.page import page_of
from amptune.search.decide.study_report import findings_of, study_report_of
from amptune.search.sampler.storage import recall

HERE = Path(__file__).resolve().parent
SOURCE, PAGE = HERE / "h200" / "unseen" / "relative_attention.journal.gz", HERE.parent / "docs" / "example-report.html"


def page() -> str:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("relative_attention").mkdir()
            Path("relative_attention", "journal.log").write_bytes(gzip.decompress(SOURCE.read_bytes()))
            record = recall(Path("relative_attention"))
        finally:
            os.chdir(before)
    study_report = study_report_of(record, record.last.objective)
    return page_of(study_report, findings_of(study_report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    written = page()
    if not parser.parse_args().check:
        PAGE.write_text(written, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written:
        print(f"{PAGE}: not what {SOURCE} says; `python reports/example_page.py` writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
