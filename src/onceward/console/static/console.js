// Keeps the first page current. Without it, and without htmx, every page and form works all the same.
"use strict";

const live = document.getElementById("live");
if (live !== null && "EventSource" in window) {
  const events = new EventSource(live.dataset.events);
  events.addEventListener("overview", (event) => {
    const focused = document.activeElement;
    const href = live.contains(focused) && focused !== null ? focused.getAttribute("href") : null;
    live.innerHTML = event.data;
    const again = href === null ? null : live.querySelector(`a[href="${CSS.escape(href)}"]`);
    if (again !== null) {
      again.focus();
    }
  });
}

// What a server refuses is worth reading, too: show it where the answer was expected.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status >= 400) {
    const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
    const notice = page.querySelector(".notice.bad");
    event.detail.target.textContent = notice === null ? event.detail.xhr.responseText.slice(0, 500) : notice.textContent;
    event.detail.target.classList.add("bad-text");
    event.detail.shouldSwap = false;
  } else {
    event.detail.target.classList.remove("bad-text");
  }
});
