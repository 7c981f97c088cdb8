#!/usr/bin/env python3
"""Write templates.jsonl beside this file: renderings of templates/*.jinja and of the snippets below.

    python make_templates.py            (needs jinja2 3.1; the oracle is jinja2 itself)

The environment is set up as transformers' chat_template_utils does it. A line holds `template` (a file
of templates/) or `source`, the variables, and `text`, or `error` where jinja2 refuses or raises.
"""
import json
import os

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_run"), [], [], body).set_lineno(lineno)

    def _run(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENV = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
ENV.filters["tojson"] = tojson
ENV.globals["raise_exception"] = raise_exception

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Météo d'une ville <now>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "the \"city\""}, "days": {"type": "integer", "default": 1, "minimum": 0.5},
    "tags": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, "unit": {"enum": ["C", "F"]}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "required": []}}}]


def m(role, content, **k):
    return dict({"role": role, "content": content}, **k)


CHATS = [
    [m("user", "What is 17 * 23?")],
    [m("system", "  Be brief.\n"), m("user", " Hi \n\n there "), m("assistant", "Hello."), m("user", "Bye 👩‍👩‍👧")],
    [m("user", "1+1?"), m("assistant", "<think>\nOne.\n</think>\n\n2"), m("user", "ok")],
    [m("user", "Weather?"), m("assistant", None, tool_calls=[{"type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}}]),
     m("tool", "21"), m("tool", "sunny"), m("assistant", "Fine.")],
    [m("user", "Weather?"), m("assistant", "", tool_calls=[{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich <x>", "days": 2}}}]),
     m("tool", "{\"temp\": 21}")],
    [m("user", [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "end"}, {"type": "text", "text": "c"}])],
    [m("wizard", "x")],
    [m("user", "a"), m("user", "b")],
]

# Each is rendered alone; between them they pin whitespace control and the semantics of the subset.
SNIPPETS = [
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if true -%}\n  b\n  {%- endif %}\n\nc", "a {%+ if true +%}\n b{% endif %}\n", "{# c #}\nx\n  {# d -#}\n  y",
    "  {{ 1 }}\n  {{- 2 -}}\n 3", "x\r\ny\r\n{% if 1 %}\r\nz{% endif %}\n\n", "{% raw %}\n {{ a }}{% endraw %}\nb", "{%- raw -%}\n {{ a }} {%- endraw -%} \n b", "a{% raw %} {% {% endraw +%}\nb",
    "{{ '{{' }}{{ \"%}\" }}{{ {'a': {'b': 1}}['a']['b'] }}", "{{ 'a\\n\\t\\'\\\"\\\\\\x41\\u00e9\\q' }}", "{{ 'a' 'b' \"c\" }}",
    "{% for x in [1,2,3] %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.cycle('a','b') }},{% endfor %}",
    "{% for x in [] %}x{% else %}none{% endfor %}{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for x in range(10) if x is odd %}{{ x }}/{{ loop.length }} {% endfor %}", "{% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for a in [1,2] %}{% for b in 'xy' %}{{ loop.depth }}{{ a }}{{ b }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1,2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(a=1, b='x') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.c }}",
    "{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set t = 1, %}{{ t }}", "{% set x %}  a{{ 1 }} {% endset %}[{{ x }}]", "{% set x | trim | upper %} ab {% endset %}[{{ x }}]",
    "{% macro f(a, b='d', c=none) %}<{{ a }}|{{ b }}|{{ c }}>{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f() }}{{ f('x', 'y', 'z') | upper }}", "{% set z = 1 %}{% macro g() %}{{ z }}{% endmacro %}{% set z = 2 %}{{ g() }}",
    "{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(5) }}", "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{% endmacro %}{{ f(b=2) }}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% filter upper | replace('B', 'x') %}abc{% endfilter %}",
    "{{ none }} {{ true }} {{ undefinedvar }} {{ 1.0 }} {{ 1e20 }} {{ 1e-7 }} {{ 1.5e300 * 1e10 }} {{ 0.1 + 0.2 }} {{ 100000000000000000.0 }}", "{{ [1, 'a\\'b', \"q\\\"\\'\", none, 1.5, true] }} {{ {'a': [1], 2: 'b'} }} {{ (1,) }} {{ () }} {{ 'é\\n\\x00\\u200b' | list }}",
    "{{ 7 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ -7.5 // 2 }} {{ 2 ** 3 ** 2 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 1 / 3 }}", "{{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ 'a' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ true + 1 }} {{ 1 ~ 'a' ~ none ~ 2.0 }}",
    "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 'a' in 'cat' }} {{ 'k' in {'k': 1} }} {{ 2 not in [1] }} {{ x in y }} {{ 1 in y }}", "{{ 1 if false }}|{{ 1 if true else 2 }}|{{ 'a' if x else 'b' if none else 'c' }}|{{ x or 'd' }}|{{ 0 and 1 }}|{{ not x }}",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ ' a b '.split(none, 1) }} {{ ' a b c '.rsplit(none, 1) }} {{ 'x'.split('xy') }} {{ ''.split() }} {{ ''.split(',') }}", "{{ '  x '.strip() ~ '|' ~ 'xxaxx'.strip('x') ~ 'xxa'.lstrip('x') ~ 'axx'.rstrip('xy') ~ '\\u3000é\\x1f'.strip() }}",
    "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'aXbX'.replace('X', 'y', 1) }} {{ 'abc'.replace('', '-') }} {{ 'abc'.upper() }} {{ 'ÀÉx'.lower() }} {{ 'hello wORLD-x'.title() }} {{ 'hELLO'.capitalize() }} {{ '-'.join(['a', 'b']) }}", "{{ 'hello'.find('l') }} {{ 'héllo'.rfind('l') }} {{ 'x'.find('y') }} {{ 'banana'.count('an') }} {{ 'a1'.isalnum() }} {{ ''.isdigit() }} {{ 'AB'.isupper() }} {{ 'a\\nb\\r\\nc'.splitlines() }} {{ 'abc'.removeprefix('a') }}",
    "{{ 'héllo'[1] }}{{ 'héllo'[-1] }}{{ 'héllo'[1:3] }}{{ 'héllo'[::-1] }}{{ 'abc'[9] }}{{ 'abc'[5:] }}{{ 'abcdef'[::2] }}{{ 'abcdef'[4:1:-1] }}", "{{ [1,2,3][1:] }}{{ [1,2,3][:-1] }}{{ [1,2,3][::-1] }}{{ [1,2,3][-2] }}{{ (1,2,3)[1:] }}{{ [1,2,3][none:2] }}{{ [1][5] }}", "{{ {'a': 1}.a }}{{ {'a': 1}['b'] }}{{ {'a': 1}.get('b') }}{{ {'a': 1}.get('b', 2) }}{{ {'items': 1}['items'] }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}{{ {'a': 1} | items | list }}",
    "{{ x is defined }}{{ none is none }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 'a' is sequence }}{{ 1 is number }}{{ true is number }}{{ true is integer }}{{ 1 is integer }}{{ 1.0 is float }}{{ true is true }}{{ 1 is true }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ 1 is in [1] }}{{ 1 is eq 1 }}{{ 2 is not gt 3 }}{{ x is undefined }}{{ false is boolean }}{{ none is sameas none }}{{ 'a' is lower }}",
    "{{ ' a '|trim }}{{ [1,2]|length }}{{ 'é€'|count }}{{ 'ab'|upper }}{{ [1,2]|join('-') }}{{ ['a','b']|join }}{{ 'ab'|list }}{{ [3,4]|first }}{{ [3,4]|last }}{{ []|first }}{{ x|default('d') }}{{ ''|default('d') }}{{ ''|d('d', true) }}{{ 'aa'|replace('a','b') }}{{ none|default('x') }}", "{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | list }}{{ ['a'] | map('upper') | list }}{{ [1, 2, 3] | select('odd') | list }}{{ [0, 1, ''] | select | list }}{{ [1, 2] | reject('equalto', 1) | list }}{{ [{'a': {'b': 1}}, {'a': {}}] | selectattr('a.b', 'defined') | list }}{{ [{'r': 1}, {}] | rejectattr('r') | list }}{{ [{'a': 1}, {}] | map(attribute='a', default=0) | list }}",
    "{{ 3.7 | int }}{{ '42' | int }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ ' 1.9 ' | int }}{{ '1.5' | float }}{{ 2 | float }}{{ 1 | string ~ 'a' }}{{ 'a' | safe }}{{ -3 | abs }}{{ [1, 2] | sum }}{{ [1, 3, 2] | max }}{{ ['b', 'A'] | sort }}{{ [3, 1] | sort(reverse=true) }}{{ [1, 1, 2] | unique | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [{'n': 2}, {'n': 1}] | sort(attribute='n') }}", "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(1, blank=true) }}|{{ 'hello (world) foo-bar' | title }}|{{ 'ab' | reverse }}{{ [1, 2] | reverse | list }}|{{ 'hELLO wORLD' | capitalize }}",
    "{{ {'a': [1, 2.0, none, true, 'é<>&\\'\\\"\\n\\x7f'], 'b': {}, 'c': []} | tojson }}", "{{ {'a': [1, {'b': 2}], 'e': [], 'f': {}} | tojson(indent=2) }}", "{{ {'b': 1, 'a': 'é😀'} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", "{{ {1: 2, none: 3, true: 4} | tojson }}{{ 1e22 | tojson }}{{ 1.0 | tojson }}",
    "{{ x | int }}", "{{ x | float }}", "{{ none | int }}{{ [] | int(3) }}", "{{ 1 is odd 2 }}", "{% for a, in [[1]] %}{{ a }}{% endfor %}", "{% for (a, b) in [[1, 2]] %}{{ a }}{{ b }}{% endfor %}", "{% set a, = [1] %}", "{{ x.y }}", "{{ x + 1 }}", "{{ 'a' + 1 }}", "{{ none.a }}", "{{ none + 'a' }}", "{{ [] | tojson(indent=x) }}", "{{ x | tojson }}", "{{ x() }}", "{{ 'a'() }}", "{{ 1 // 0 }}", "{% for i in none %}{% endfor %}", "{{ raise_exception('no way') }}", "{% if %}{% endif %}", "{{ 1 +", "{% endfor %}", "{% for x in y %}", "{{ 'a }}", "{% set x.y = 1 %}", "{{ [1, 2 }}", "{% break %}", "{{ 1 < 'a' }}", "{{ 1 in 2 }}", "{{ messages | map('nope') | list }}", "{{ (messages | selectattr('a')) | length }}",
    "{% if messages | selectattr('role', 'equalto', 'nobody') %}generators are true{% endif %}", "{% set g = [1, 2] | select %}{{ g | list }}{{ g | list }}", "{{ dict(a=1, b=2) }}{{ range(3) | list }}{{ range(5, 1, -2) | list }}", "{{ foo.bar is defined if foo is defined else 'no foo' }}", "{{ {'a': none}.a is none }} {{ {'a': 1}.b is defined }}", "{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y }}", "{{ loop is defined }}{% for i in [1] %}{{ loop is defined }}{% endfor %}", "{% if true: %}a{% endif %}", "{{ -1 | abs }}{{ (-1) | abs }}{{ 1 - -1 }}{{ not true == false }}{{ not 1 in [1] }}", "{{ 'a' ~ 1 + 2 }}", "{{ [1, 2] | last + 1 }}", "{{ 'x' if 1 is odd and 2 is even }}", "{{ {'a': 1}|length }}{{ x|length }}", "{{ messages[0].content[0] }}{{ messages.0.role }}",
]


def main():
    rows = []

    def add(row, source, variables):
        try:
            row["text"] = ENV.from_string(source).render(**variables)
        except Exception as e:  # whatever jinja2 or Python raise: the renderer has to refuse too
            row["error"] = type(e).__name__
        rows.append(row)

    base = {"bos_token": "<s>", "eos_token": "</s>", "documents": None}
    for name in sorted(n for n in os.listdir(os.path.join(HERE, "templates")) if n.endswith(".jinja")):
        source = open(os.path.join(HERE, "templates", name), encoding="utf-8", newline="").read()
        for messages in CHATS:
            for tools in (None, TOOLS):
                for extra in ({}, {"tools_in_user_message": False, "date_string": "01 Jan 2025"}, {"builtin_tools": ["code_interpreter", "get_weather"]}):
                    if extra and "llama" not in name:
                        continue
                    variables = dict(base, tools=tools, **extra)
                    add({"template": name, "messages": messages, "extra": variables, "add_generation_prompt": True},
                        source, dict(variables, messages=messages, add_generation_prompt=True))
    for source in SNIPPETS:
        add({"source": source, "messages": CHATS[0], "extra": base, "add_generation_prompt": False},
            source, dict(base, messages=CHATS[0], add_generation_prompt=False, tools=None))
    with open(os.path.join(HERE, "templates.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(len(rows), "rows,", sum("error" in r for r in rows), "errors")


if __name__ == "__main__":
    main()
