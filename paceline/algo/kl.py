"""The distance to the reference model, KL(policy || reference), from tokens the policy sampled.

With d = log policy - log reference:

    estimate   number                 as a term of the loss, its gradient on fresh tokens is that of
    k1         d, unbiased            KL(policy || reference)   (its own gradient would be 0 on average: see kl_loss)
    k2         d^2 / 2, biased        KL(policy || reference)
    k3         e^-d - 1 + d, unbiased KL(reference || policy)   (this is GRPO's)

Taken off the reward, k1 and k3 are unbiased and k2 is not.
"""

from torch import Tensor

from paceline.algo.settings import Estimator

ADAPTION_RATE, LARGEST_ERROR = 0.1, 0.2
K3_TANGENT = 3.0  # the reference gives the token 20 times the policy's probability


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return e^x - 1 - x with x = other - logprobs; beyond K3_TANGENT its tangent there.

    So the gradient grows to e^K3_TANGENT - 1 = 19 and stays there: a token that the policy has
    made improbable is still pulled back, but cannot dominate the step.
    """
    difference = other - logprobs
    bounded = difference.clamp(max=K3_TANGENT)
    return bounded.exp() * (1 + difference - bounded) - 1 - difference


def kl_estimate(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """Per token, as a number."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, other)


def kl_loss(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """Per token, as a term of the loss. k1 keeps its number but gets the score-function gradient d * grad log policy."""
    if estimator == "k1":
        distance = k1(logprobs, other).detach()
        return distance + distance * (logprobs - logprobs.detach())
    return kl_estimate(logprobs, other, estimator)


def adapted(coefficient: float, kl: float, target: float) -> float:
    """The coefficient of the next step: up to 2 % more when the KL is above its target, up to 2 % less when below.
    (Fine-Tuning Language Models from Human Preferences. Ziegler et al., 2019, arXiv:1909.08593.)"""
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + ADAPTION_RATE * error)
