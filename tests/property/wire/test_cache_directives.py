"""However the header Cache-Control is written, what it says is heard; and any text is read or refused."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl
from maitred.wire.cache_control import add_directives

ages = st.none() | st.integers(0, 2**31)
controls = st.builds(
    CacheControl,
    no_cache=st.booleans(),
    no_store=st.booleans(),
    only_if_cached=st.booleans(),
    max_age_s=ages,
)
others = st.sampled_from(
    ["", "no-transform", "max-stale=5", 'private="a, no-store, max-age=x"', 'x="\\", no-cache"', "min-fresh=soon"]
)


def directives_of(control):
    """The control as directives of the header."""
    named = {
        "no-cache": control.no_cache,
        "no-store": control.no_store,
        "only-if-cached": control.only_if_cached,
    }
    directives = [name for name, is_set in named.items() if is_set]
    return directives + ([] if control.max_age_s is None else [f"max-age={control.max_age_s:d}"])


def in_any_case(text):
    """The text with each letter in upper or lower case."""
    quoted = '"' in text
    cases = st.lists(st.booleans(), min_size=len(text), max_size=len(text))
    varied = cases.map(lambda upper: "".join(c.upper() if up else c for c, up in zip(text, upper, strict=True)))
    return st.just(text) if quoted else varied


@st.composite
def written(draw, control):
    """A header that says no more and no less."""
    entries = draw(st.permutations(directives_of(control) + draw(st.lists(others, max_size=3))))
    spaced = [
        draw(st.sampled_from(["", " ", "\t "])) + draw(in_any_case(entry)) + draw(st.sampled_from(["", " "]))
        for entry in entries
    ]
    return ",".join(spaced)


@given(data=st.data(), control=controls)
def test_what_is_written_is_read(data, control):
    assert add_directives(DEFAULT_CACHE_CONTROL, data.draw(written(control))) == control


@given(data=st.data(), body=controls, header=controls)
def test_body_and_header_add_up(data, body, header):
    both = add_directives(body, data.draw(written(header)))
    given_ages = [age for age in (body.max_age_s, header.max_age_s) if age is not None]
    assert both == CacheControl(
        no_cache=body.no_cache or header.no_cache,
        no_store=body.no_store or header.no_store,
        only_if_cached=body.only_if_cached or header.only_if_cached,
        max_age_s=min(given_ages, default=None),
    )


@given(text=st.text(st.sampled_from('max-age=0"\\, no-store;\t9é')) | st.text())
def test_any_text_is_read_or_refused(text):
    try:
        age_s = add_directives(DEFAULT_CACHE_CONTROL, text).max_age_s
    except InvalidRequest:
        age_s = None
        refused = True
    else:
        refused = False
    assert age_s is None or 0 <= age_s <= 2**31
    assert "max-age" in text.lower() or (age_s, refused) == (None, False)
