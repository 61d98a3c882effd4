"use strict";
// Browsers start no worker from file://. There, what the search asks for is a frame that listens in its place.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = new Promise((started) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = () => started(inside);
        frame.contentDocument.head.append(script);
      });
    }

    async postMessage(data) {
      (await this.inside).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
