from lightning_dist.engine.tensors.patch import replace_method, surround_method


class Speaker:
    def speak(self) -> str:
        return "its class's"


def test_a_method_of_the_class_comes_back() -> None:
    speaker = Speaker()
    undo = replace_method(speaker, "speak", lambda: "another")
    assert speaker.speak() == "another"
    undo()
    assert speaker.speak() == "its class's"
    assert "speak" not in vars(speaker)


def test_so_does_one_of_the_object() -> None:
    speaker = Speaker()
    speaker.speak = lambda: "its own"  # type: ignore[method-assign]
    first = replace_method(speaker, "speak", lambda: "another")
    second = replace_method(speaker, "speak", lambda: "a third one")
    assert speaker.speak() == "a third one"
    second()
    assert speaker.speak() == "another"
    first()
    assert speaker.speak() == "its own"


def test_functions_are_called_before_and_after() -> None:
    speaker, calls = Speaker(), list[str]()
    undo = surround_method(
        speaker, "speak", before=lambda: calls.append("in"), after=lambda: calls.append("out")
    )
    assert speaker.speak() == "its class's"
    assert calls == ["in", "out"]
    undo()
    assert "speak" not in vars(speaker)
