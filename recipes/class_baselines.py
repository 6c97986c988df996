"""Baselines of a text classifier: the most frequent class, and words without their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

try:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
except ImportError as error:
    raise ImportError(
        "The bag of words is scikit-learn's. Use `pip install 'lightning-dist[recipes]'`."
    ) from error

_INVERSE_PENALTIES = (1.0, 10.0, 100.0)


def majority_accuracy(train: Sequence[int], test: Sequence[int]) -> float:
    """Scores the class that is the most frequent one in training.

    Args:
        train: Classes of the training texts.
        test: Classes of the test texts.

    Returns:
        Share of the test texts that have it.
    """
    ((most_frequent, _),) = Counter(train).most_common(1)
    return sum(label == most_frequent for label in test) / len(test)


def bag_of_words_accuracy(
    train: tuple[Sequence[str], Sequence[int]],
    val: tuple[Sequence[str], Sequence[int]],
    test: tuple[Sequence[str], Sequence[int]],
) -> float:
    """Scores a logistic regression on tf-idf weights of words.

    Args:
        train: Texts and their classes.
        val: Validation texts and their classes, which choose the strength of regularization.
        test: Test texts and their classes.

    Returns:
        Share of the test texts that it gets right.
    """
    words = TfidfVectorizer(sublinear_tf=True)
    features = words.fit_transform(train[0])
    models = [
        LogisticRegression(C=inverse_penalty, max_iter=1000).fit(features, train[1])
        for inverse_penalty in _INVERSE_PENALTIES
    ]
    best = max(models, key=lambda model: model.score(words.transform(val[0]), val[1]))
    return float(best.score(words.transform(test[0]), test[1]))
