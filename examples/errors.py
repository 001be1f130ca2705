"""What may go wrong is one class for each decision: mend the request, wait, or give up."""

import time

from treewire import Client
from treewire.errors import InvalidRequest, Overloaded, TreewireError, Unavailable

with Client() as client:
    try:
        client.generate("Hello", max_tokens=0)
    except InvalidRequest as error:
        print(f"mend {error.metadata['field']}: {error.message} (request {error.request_id})")

    for attempt in range(3):
        try:
            print(client.generate("Hello", max_tokens=8).text)
            break
        except (Overloaded, Unavailable) as error:
            time.sleep(error.retry_after_seconds or 2**attempt)
        except TreewireError as error:
            print(f"{error.reason}: {error.message}")
            break
