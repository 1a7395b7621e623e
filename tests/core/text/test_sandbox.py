"""Templates that come with a model may neither reach Python nor work without end."""

from __future__ import annotations

import time

import pytest
from jinja2.exceptions import SecurityError

from core.errors import TemplateRefused
from core.text.sandbox import Meter, TemplateSandbox, strftime_at

CHARS = 100_000


def render(source: str, **values: object) -> str:
    sandbox = TemplateSandbox()
    meter = Meter(cpu_s=0.3, chars=CHARS)
    return sandbox.render(sandbox.from_string(source), meter, **values)


ENDLESS = {
    "loops that write": "{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}"
    "{% endfor %}",
    "loops that do not": "{% for a in r %}{% for b in r %}{% for c in r %}{% if 0 %}{% endif %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "calls that double": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "loops in a set block": "{% set x %}{% for a in r %}{% for b in r %}y{% endfor %}{% endfor %}"
    "{% endset %}",
    "filters in loops": "{% for a in r %}{{ r | map('string') | join | length }}{% endfor %}",
}
LARGE = {
    "repeated text": "{{ 'x' * 10 ** 9 }}",
    "repeated list": "{{ ([0] * 10 ** 9) | length }}",
    "doubling by plus": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by tilde": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by blocks": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "doubling by arguments": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('xx') }}",
    "method that pads": "{{ 'x'.ljust(10 ** 9) }}",
    "filter that pads": "{{ 'x' | indent(10 ** 9) }}",
    "old format": "{{ '%999999999d' % 1 }}",
    "old format with a width beside": "{{ '%*d' % (999999999, 1) }}",
    "old format of a name": "{{ '%(n)999999999d' % {'n': 1} }}",
    "old format by filter": "{{ '%999999999d' | format(1) }}",
    "new format": "{{ '{:>999999999}'.format(1) }}",
    "new format with a nested width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "replace": "{% set a = 'a' * 90000 %}{{ a.replace('a', a) | length }}",
    "replace by filter": "{% set a = 'a' * 90000 %}{{ a | replace('a', a) | length }}",
    "join": "{% set a = 'a' * 90000 %}{{ a.join(range(90000) | map('string') | list) | length }}",
    "join by filter": "{% set a = 'a' * 90000 %}{{ range(90000) | list | join(a) | length }}",
    "power": "{{ (10 ** (10 ** 10)) | string | length }}",
    "date": "{{ strftime_now('%999999999d') }}",
    "range": "{{ range(10 ** 9) | list | length }}",
    "json": "{{ [1] | tojson(indent=10 ** 9) }}",
    "long output": "{% for i in range(90000) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_work_is_stopped(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateRefused, match=r"(takes|makes) more than"):
        render(source, r=range(90_000))
    assert time.thread_time() - began < 3


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_much_out_of_little_is_stopped(source: str) -> None:
    began = time.thread_time()
    with pytest.raises((TemplateRefused, OverflowError)):
        render(source, strftime_now=strftime_at(0))
    assert time.thread_time() - began < 1


def test_recursion_ends() -> None:
    with pytest.raises(RecursionError):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, messages=[1])


def test_what_templates_use_still_works() -> None:
    source = (
        "{%- for m in messages if m.role != 'x' -%}"
        "{%- if loop.index0 == 3 -%}{%- break -%}{%- endif -%}"
        "{{- loop.index }}/{{ loop.length }}{{ loop.last }} {{ m.text | trim | upper -}}"
        "{%- else -%}none{%- endfor -%}"
        "{%- generation -%}<{{ {'b': '<é>', 'a': 1} | tojson }}>{%- endgeneration -%}"
        "{%- set text %}[{{ 'a-b'.split('-') | join('+') }}]{% endset -%}{{ text }}"
        "{{- '%s=%05.1f' % ('x', 2.5) }} {{ 'abc'[::-1] }} {{ '{}!'.format('hi') }}"
        "{{- missing | default(100000) }}{{ [3, 1] | sort | first }}"
        "{{- ' **2024 %s** ' % 'x' }}{{ '2024 {:>3}'.format(1) }}"
    )
    messages = [
        {"role": "u", "text": " a "},
        {"role": "x", "text": "no"},
        {"role": "v", "text": "b"},
    ]
    assert render(source, messages=messages) == (
        '1/2False A2/2True B<{"b": "<é>", "a": 1}>[a+b]x=002.5 cba hi!1000001 **2024 x** 2024   1'
    )


def test_dates_are_those_of_the_request() -> None:
    assert strftime_at(1_700_000_000)("%d %b %Y %H:%M") == "14 Nov 2023 22:13"
