"""KL divergence from the reference model, KL(policy || reference), estimated from sampled tokens.

With d = log policy - log reference:

    estimator  value                       gradient as a loss term on fresh tokens
    k1         d, unbiased                 that of KL(policy || reference), see kl_loss
    k2         d^2 / 2, biased             that of KL(policy || reference)
    k3         e^-d - 1 + d, unbiased      that of KL(reference || policy); GRPO uses it

k3 is unbiased up to K3_TANGENT, see there. In the reward, only the value matters.
"""

from torch import Tensor

from paceline.algo.settings import Estimator

ADAPTATION_RATE, LARGEST_ERROR = 0.1, 0.2
K3_TANGENT = 3.0  # the reference gives the token 20 times the policy's probability


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return e^x - 1 - x with x = other - logprobs; beyond K3_TANGENT, return its tangent there.

    The gradient therefore never exceeds e^K3_TANGENT - 1 = 19. A token that the policy has made
    improbable is still pulled back, but it cannot dominate the step.
    """
    difference = other - logprobs
    bounded = difference.clamp(max=K3_TANGENT)
    return bounded.exp() * (1 + difference - bounded) - 1 - difference


def kl_estimate(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimated KL of each token."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, other)


def kl_loss(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """Return the KL of each token as a loss term.

    The gradient of k1 is 0 on average, so k1 keeps its value and gets the score-function gradient
    d * grad log policy instead.
    """
    if estimator == "k1":
        distance = k1(logprobs, other).detach()
        return distance + distance * (logprobs - logprobs.detach())
    return kl_estimate(logprobs, other, estimator)


def adapted(coefficient: float, kl: float, target: float) -> float:
    """Return the KL coefficient of the next step.

    It grows by up to 2% if the KL is above its target and shrinks by up to 2% if it is below.
    Fine-Tuning Language Models from Human Preferences. Ziegler et al., 2019, arXiv:1909.08593.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + ADAPTATION_RATE * error)
