"""The values that a Python Worker handles, without a process: headers, bodies, forms, streams."""

from __future__ import annotations

import asyncio
import json
from math import inf, nan

import pytest

from edge.workers.python.inside.body import File
from edge.workers.python.inside.ffi import JsException, create_proxy, to_js
from edge.workers.python.inside.headers import Headers
from edge.workers.python.inside.js import JSON, URL, Object, TextEncoder, TransformStream
from edge.workers.python.inside.messages import Request, Response
from edge.workers.python.inside.values import JsObject, wrap


def test_headers_know_no_case_and_keep_what_repeats() -> None:
    headers = Headers({"Content-Type": "text/plain"})
    headers.append("Set-Cookie", "a=1")
    headers.append("set-cookie", "b=2")
    assert headers["content-TYPE"] == "text/plain"
    assert headers.get("x-none", "nothing") == "nothing"
    assert headers.getSetCookie() == ["a=1", "b=2"]
    assert headers.get_all("SET-COOKIE") == ["a=1", "b=2"]
    assert "CONTENT-type" in headers
    del headers["content-type"]
    assert headers.keys() == ["set-cookie"]


@pytest.mark.parametrize(("name", "value"), [("a\r\nb", "1"), ("a", "1\r\nb: 2"), ("", "1")])
def test_a_header_cannot_carry_another(name: str, value: str) -> None:
    with pytest.raises(TypeError, match="Invalid header"):
        Headers().append(name, value)


async def test_a_body_is_read_once() -> None:
    request = Request("http://x/", method="POST", body='{"a": 1}')
    twin = request.clone()
    assert await request.json() == {"a": 1}
    assert request.body_used
    with pytest.raises(OSError, match="read already"):
        await request.text()
    assert await twin.text() == '{"a": 1}'


async def test_forms() -> None:
    plain = Request("http://x/", method="POST", body="a=1&a=2&b=%C3%A9",
                    headers={"content-type": "application/x-www-form-urlencoded"})  # fmt: skip
    form = await plain.form_data()
    assert (form.get_all("a"), form["b"]) == (["1", "2"], "é")
    parts = (
        b'--edge\r\ncontent-disposition: form-data; name="t"\r\n\r\nhello\r\n'
        b'--edge\r\ncontent-disposition: form-data; name="f"; filename="x.bin"\r\n'
        b"content-type: application/octet-stream\r\n\r\n\x00\xff\r\n--edge--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=edge"}
    form = await Request("http://x/", method="POST", body=parts, headers=kind).form_data()
    assert form["t"] == "hello"
    file = form["f"]
    assert isinstance(file, File)
    assert (file.name, await file.bytes()) == ("x.bin", b"\x00\xff")


def test_what_a_response_may_be() -> None:
    assert Response.json({"é": 1}, status=201).headers["content-type"] == "application/json"
    assert Response.redirect("https://example.org/").headers["location"] == "https://example.org/"
    with pytest.raises(ValueError, match="whole URL"):
        Response.redirect("/here")
    with pytest.raises(TypeError, match=r"cannot be a dict; for JSON there is Response.from_json"):
        Response({"a": 1})
    with pytest.raises(TypeError, match="status 204 has no body"):
        Response("x", 204)
    with pytest.raises(ValueError, match="from 200 to 599"):
        Response("x", 600)
    made = Response.new("x", to_js({"status": 404, "headers": {"a": "b"}}))
    assert (made.status, made.headers["a"]) == (404, "b")


async def test_json_is_both_of_a_kind() -> None:
    assert await Response.json([1, 2]).json() == [1, 2]


def test_objects_as_javascript_has_them() -> None:
    found = wrap({"keys": [{"name": "a"}], "n": None})
    assert found.keys[0].name == "a"
    assert found["keys"].length == 1
    assert found.to_py() == {"keys": [{"name": "a"}], "n": None}
    assert type(found.to_py()["keys"][0]) is dict
    with pytest.raises(AttributeError):
        _ = found.missing
    assert Object.fromEntries([["a", 1]]).a == 1
    assert isinstance(to_js({"a": {"b": 1}}, dict_converter=Object.fromEntries).a, JsObject)
    assert json.loads(JSON.stringify({"a": found})) == {"a": found.to_py()}
    assert JSON.stringify({"a": [nan, -inf, 1.5]}) == '{"a":[null,null,1.5]}'
    proxy = create_proxy(lambda: 7)
    assert proxy() == 7
    proxy.destroy()
    with pytest.raises(JsException, match="destroyed"):
        proxy()


async def test_a_transform_stream_hands_pieces_over() -> None:
    stream = TransformStream.new()
    writer = stream.writable.getWriter()

    async def write() -> None:
        for word in ("a", "b"):
            await writer.write(TextEncoder.new().encode(word))
        await writer.close()

    writing = asyncio.ensure_future(write())
    response = Response(stream.readable)
    assert await response.text() == "ab"
    await writing


def test_urls() -> None:
    url = URL.new("http://u:p@host:81/a/b?x=1&x=2#end")
    assert (url.host, url.hostname, url.port) == ("host:81", "host", "81")
    assert (url.pathname, url.search, url.hash) == ("/a/b", "?x=1&x=2", "#end")
    assert url.searchParams.getAll("x") == ["1", "2"]
    with pytest.raises(TypeError, match="Invalid URL"):
        URL.new("/a")
