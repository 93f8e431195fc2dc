"""Operations on state: arrays and integers in, arrays out, no policy.

The law kept here: this package imports nothing else of Milepost, and every operation has a plain definition in
`reference` that the fast ones are tested against, states included.
"""
