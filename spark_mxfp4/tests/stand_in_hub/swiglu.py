def swiglu_fn(x, alpha, limit):
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)
