"""Can the steps of one stream tell a busy pipeline from a wrong prediction? (issue 54, docs/decisions.md)

A pipeline is in use, for which more was predicted than for a tensor split. 3 % of the pipelines are 2 to 5 times slower than
predicted, 30 % are on machines or links that are 2 to 8 times slower for all steps but 5 %. A tensor split waits for the slowest
rank in each exchange, so load slows it more. Each rule leaves a pipeline whose steps are half as fast as tensor's prediction.
"""
import math, random

DRAWS, STEPS = 20_000, 64
RULES = {"mean": lambda steps: sum(steps) / STEPS, "lower quartile": lambda steps: sorted(steps)[STEPS // 4], "fastest": min}


def draw():
    """Seconds of the steps, tensor's predicted tokens a second, whether tensor is faster by 15 % now."""
    noise = lambda sigma: math.exp(random.gauss(0, sigma))
    predicted = random.uniform(5, 100)
    tensor = predicted * random.uniform(0.3, 1.0)
    speed, other = predicted * noise(0.15), tensor * noise(0.15)
    if random.random() < 0.03:
        speed /= random.uniform(2, 5)
    load = random.uniform(2, 8) if random.random() < 0.3 else 1
    steps = [(load if random.random() < 0.95 else 1) / speed * noise(0.05) for _ in range(STEPS)]
    return steps, tensor, other / load**1.5 > 1.15 * speed / load


random.seed(1)
left = {name: [0, 0] for name in RULES}
for _ in range(DRAWS):
    steps, tensor, is_right = draw()
    for name, step_s in RULES.items():
        if step_s(steps) * tensor > 2:
            left[name][not is_right] += 1
for name, (rightly, wrongly) in left.items():
    print(f"{name}: {rightly} of {DRAWS} left rightly, {wrongly} wrongly")
