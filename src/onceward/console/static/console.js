// Keeps the first page current. Without it, and without htmx, every page and form works all the same.
"use strict";

const live = document.getElementById("live");
if (live !== null && "EventSource" in window) {
  let events = null;
  const show = (event) => {
    const focused = document.activeElement;
    const href = live.contains(focused) && focused !== null ? focused.getAttribute("href") : null;
    live.innerHTML = event.data;
    const again = href === null ? null : live.querySelector(`a[href="${CSS.escape(href)}"]`);
    if (again !== null) {
      again.focus();
    }
  };
  // A browser has six connections to a server: tabs that nobody sees must not take them.
  const follow = () => {
    if (document.hidden) {
      events?.close();
      events = null;
    } else if (events === null) {
      events = new EventSource(live.dataset.events);
      events.addEventListener("overview", show);
      events.addEventListener("error", () => {
        if (events?.readyState === EventSource.CLOSED) { // refused, such as for too many of them
          setTimeout(() => document.hidden || location.reload(), 10000);
        }
      });
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
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
