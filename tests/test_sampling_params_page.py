"""docs/sampling_params.md: it tells every field of the class, and of vLLM's, as it is."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "sampling_params.md").read_text(encoding="utf-8")

# The fields of vLLM that a user gives, as of August 2026.
VLLMS = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids
flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output output_kind stream_interval structured_outputs logit_bias
allowed_token_ids bad_words extra_args skip_reading_prefix_cache thinking_token_budget
repetition_detection routed_experts_prompt_start skip_clone
"""


class Row(NamedTuple):
    """A line of the table of fields."""

    field: str
    default: str
    here: str
    notes: str


ROWS = [
    Row(*found)
    for found in re.findall(r"^\| `(\w+)` \| `(.+?)` \| ([\w ]+) \| (.*)\|$", PAGE, re.M)
]


def test_the_table_has_the_fields_of_the_class_in_its_order():
    assert [row.field for row in ROWS] == [one.name for one in dataclasses.fields(SamplingParams)]


def test_all_of_vllms_fields_are_there_and_ours_are_named_so():
    own = {row.field for row in ROWS if row.here == "own"}
    theirs = set(VLLMS.split())
    assert {row.field for row in ROWS} == theirs | own
    assert not theirs & own


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_a_row_tells_the_default_and_whether_it_is_refused(row: Row):
    default = SamplingParams.__dataclass_fields__[row.field].default
    assert row.default in (repr(default), str(default))
    assert row.here in ("as vLLM", "differs", "own", "refused")
    if row.here != "as vLLM":
        assert row.notes.strip()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{row.field: object()})
    assert ("is refused" in str(caught.value)) == (row.here == "refused")


def test_the_page_is_found_from_the_front():
    assert "(docs/sampling_params.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
